//! The parser: every prefix, every split, the limits, and rustls as an oracle.

use bko_install::sni::{MAX_HANDSHAKE, MAX_RECORDS, MAX_WIRE, Peek, Reason, peek};
use proptest::prelude::*;
use rustls::server::Acceptor;
use rustls::version::{TLS12, TLS13};

use super::farm::repetitions;
use super::hellos::{self, Made, NAME};

fn all() -> Vec<(String, Option<&'static str>, Vec<u8>)> {
    let mut all: Vec<_> =
        hellos::captured().into_iter().map(|(file, name, bytes)| (file.to_owned(), name, bytes)).collect();
    all.push(("rustls".into(), Some(NAME), hellos::rustls(NAME, &[&TLS13, &TLS12], &[b"h2"])));
    all.push(("rustls 1.2".into(), Some(NAME), hellos::rustls(NAME, &[&TLS12], &[])));
    all.push((
        "rustls, many protocols".into(),
        Some(NAME),
        hellos::rustls(NAME, &[&TLS13], &[[b'x'; 200].as_slice(); 40]),
    ));
    all.push(("rustls to an address".into(), None, hellos::rustls("192.0.2.7", &[&TLS13], &[])));
    all
}

fn expected(name: Option<&str>) -> Peek {
    name.map_or(Peek::Reject(Reason::NoSni), |name| Peek::Sni(name.to_owned()))
}

/// What rustls makes of the same bytes: nothing yet, a name or none, or an error.
fn oracle(mut bytes: &[u8]) -> Result<Option<Option<String>>, String> {
    let mut acceptor = Acceptor::default();
    loop {
        match acceptor.accept() {
            Ok(Some(accepted)) => return Ok(Some(accepted.client_hello().server_name().map(str::to_owned))),
            Ok(None) if bytes.is_empty() => return Ok(None),
            Ok(None) => acceptor.read_tls(&mut bytes).map(drop).map_err(|error| error.to_string())?,
            Err((error, _)) => return Err(error.to_string()),
        }
    }
}

/// Where both decide, they agree; rustls looks at more of the hello than we do,
/// so it alone may refuse one that has a name.
fn agree(bytes: &[u8]) -> Result<(), TestCaseError> {
    match (peek(bytes), oracle(bytes)) {
        // rustls has dropped the trailing dot, which we do when the name is matched.
        (Peek::Sni(ours), Ok(Some(Some(theirs)))) => {
            let ours = ours.to_ascii_lowercase();
            prop_assert_eq!(ours.strip_suffix('.').unwrap_or(&ours), theirs);
        }
        // rustls hides names that are no DNS names, addresses for example.
        (Peek::Sni(ours), Ok(Some(None))) => {
            let known = rustls::pki_types::DnsName::try_from(ours.as_str()).is_ok();
            prop_assert!(!known, "rustls sees no name in {}", ours);
        }
        (Peek::Sni(_), Err(_)) | (Peek::Incomplete, Ok(None)) => {}
        (Peek::Reject(_), Ok(Some(None)) | Err(_)) => {}
        // We give up early on what cannot become a hello any more, and rustls knows no such limits.
        (Peek::Reject(_), Ok(None)) | (Peek::Reject(Reason::TooLarge), Ok(_)) => {}
        // Behind a host name rustls passes over an entry of a kind that was never defined.
        (Peek::Reject(Reason::Malformed), Ok(Some(Some(theirs)))) => {
            let message = hellos::joined(bytes).to_ascii_lowercase();
            let mut windows = message.windows(theirs.len() + 1);
            prop_assert!(windows.any(|w| w.starts_with(theirs.as_bytes()) && !w.ends_with(&[0])), "sees {}", theirs);
        }
        (ours, theirs) => prop_assert!(false, "we say {ours:?}, rustls {theirs:?}"),
    }
    Ok(())
}

#[test]
fn every_prefix_of_every_hello_is_incomplete_and_the_whole_has_its_name() {
    for (source, name, hello) in all() {
        for length in 0..hello.len() {
            assert_eq!(peek(&hello[..length]), Peek::Incomplete, "{source}, {length} bytes");
        }
        assert_eq!(peek(&hello), expected(name), "{source}");
        agree(&hello).unwrap();
    }
}

#[test]
fn records_of_any_size_carry_the_same_name() {
    for (source, name, hello) in all() {
        let handshake = hellos::joined(&hello);
        for size in [64, 200, 1000] {
            let split = hellos::records(&handshake, size);
            if handshake.len().div_ceil(size) > MAX_RECORDS {
                assert_eq!(peek(&split), Peek::Reject(Reason::TooLarge), "{source} in records of {size}");
                continue;
            }
            for length in 0..split.len() {
                assert_eq!(peek(&split[..length]), Peek::Incomplete, "{source} in records of {size}, {length} bytes");
            }
            assert_eq!(peek(&split), expected(name), "{source} in records of {size}");
            agree(&split).unwrap();
        }
    }
}

#[test]
fn records_of_one_byte_count_up_to_their_limit() {
    let handshake = Made::new().sni(NAME.as_bytes()).handshake();
    let one_byte_records = |count: usize| {
        let (head, tail) = handshake.split_at(count);
        [hellos::records(head, 1), hellos::record(tail)].concat()
    };
    assert_eq!(peek(&one_byte_records(MAX_RECORDS - 1)), expected(Some(NAME)));
    assert_eq!(peek(&one_byte_records(MAX_RECORDS)), Peek::Reject(Reason::TooLarge));
    assert_eq!(peek(&hellos::records(&handshake[..MAX_RECORDS - 1], 1)), Peek::Incomplete);
    assert_eq!(peek(&hellos::records(&handshake[..MAX_RECORDS], 1)), Peek::Reject(Reason::TooLarge));
}

#[test]
fn hellos_route_up_to_the_limit_and_not_one_byte_above() {
    for size in [255, 256, 257, 4095, 4096, 4097, 8192, 15_000, MAX_HANDSHAKE - 1, MAX_HANDSHAKE] {
        let made = Made::new().sni(NAME.as_bytes()).padded_to(size);
        assert_eq!(made.handshake().len(), size);
        assert_eq!(peek(&made.wire()), expected(Some(NAME)), "{size}");
        assert_eq!(peek(&hellos::records(&made.handshake(), 300)), expected(Some(NAME)), "{size} in records of 300");
    }
    let above = Made::new().sni(NAME.as_bytes()).padded_to(MAX_HANDSHAKE + 1);
    assert_eq!(peek(&above.wire()), Peek::Reject(Reason::TooLarge));
    assert_eq!(peek(&above.wire()[..9]), Peek::Reject(Reason::TooLarge), "as soon as its length is known");
    assert_eq!(peek(&[22, 3, 1, 0x40, 1]), Peek::Reject(Reason::TooLarge), "a record longer than TLS allows");
}

#[test]
fn bytes_behind_the_hello_change_nothing() {
    for (source, name, hello) in all() {
        for poison in [0x00, 0x16, 0xff] {
            let bytes = [hello.as_slice(), &[poison; 500]].concat();
            assert_eq!(peek(&bytes), expected(name), "{source}");
        }
    }
}

#[test]
fn bytes_that_were_not_received_are_not_read() {
    for (source, name, hello) in all() {
        let mut buffer = vec![0xff; MAX_WIRE];
        for length in 0..=hello.len() {
            buffer[..length].copy_from_slice(&hello[..length]);
            let want = if length < hello.len() { Peek::Incomplete } else { expected(name) };
            assert_eq!(peek(&buffer[..length]), want, "{source}, {length} bytes");
        }
    }
}

#[test]
fn names_come_out_as_they_were_sent() {
    let long = "a".repeat(254);
    for name in ["BuildKitD-X.Example.org", "x.example.org.", "a.b.c.example.org", "*.example.org", "192.0.2.7", &long]
    {
        assert_eq!(peek(&Made::new().sni(name.as_bytes()).wire()), expected(Some(name)));
    }
}

#[test]
fn grease_and_an_outer_name_of_encrypted_hello_are_passed_over() {
    let hello = Made::new()
        .extension(0x0a0a, &[])
        .extension(0xfe0d, &[0; 200])
        .sni(NAME.as_bytes())
        .extension(0xfafa, &[0])
        .wire();
    assert_eq!(peek(&hello), expected(Some(NAME)));
}

#[test]
fn hellos_without_a_name_say_so() {
    assert_eq!(peek(&Made::new().wire()), Peek::Reject(Reason::NoSni));
    assert_eq!(peek(&Made::new().extension(43, &[2, 3, 4]).wire()), Peek::Reject(Reason::NoSni));
    let without_extensions = [&[3, 3], [7; 32].as_slice(), &[0, 0, 2, 0x13, 1, 1, 0]].concat();
    assert_eq!(peek(&hellos::record(&hellos::handshake(&without_extensions))), Peek::Reject(Reason::NoSni));
}

#[test]
fn what_is_not_tls_is_refused_by_its_first_bytes() {
    for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"PROXY TCP4", b"SSH-2.0", &[0x80, 0x2e, 1, 3, 1], &[0], &[22, 2], &[23]]
    {
        assert_eq!(peek(bytes), Peek::Reject(Reason::NotTls), "{bytes:?}");
    }
    assert_eq!(peek(&[]), Peek::Incomplete);
    assert_eq!(peek(&[22]), Peek::Incomplete);
}

#[test]
fn malformed_hellos_are_refused() {
    let name = NAME.as_bytes();
    let good = Made::new().sni(name).handshake();
    let made = |extension: &[u8]| Made::new().extension(0, extension).wire();
    let mut cases = vec![
        ("two server name extensions", Made::new().sni(name).sni(name).wire()),
        ("an empty name", Made::new().sni(b"").wire()),
        ("a name of 255 bytes", Made::new().sni(&[b'a'; 255]).wire()),
        ("a zero byte in the name", Made::new().sni(b"a\0b").wire()),
        ("a name that is not ASCII", Made::new().sni("bücher".as_bytes()).wire()),
        ("an empty extension", made(&[])),
        ("an empty list", made(&[0, 0])),
        ("two names", made(&[0, 8, 0, 0, 1, b'a', 0, 0, 1, b'b'])),
        ("another kind of name", made(&[0, 4, 1, 0, 1, b'a'])),
        ("bytes behind the list", made(&[0, 4, 0, 0, 1, b'a', 0])),
        ("a name longer than its list", made(&[0, 4, 0, 0, 2, b'a'])),
        ("another handshake message", hellos::record(&[2, 0, 0, 0])),
        ("an empty record", [&[22, 3, 1, 0, 0], hellos::record(&good).as_slice()].concat()),
        ("an alert in the middle", [hellos::record(&good[..50]).as_slice(), &[21, 3, 1, 0, 2, 1, 0]].concat()),
        ("another protocol in the middle", [hellos::record(&good[..50]).as_slice(), &[22, 2]].concat()),
        ("an empty hello", hellos::record(&hellos::handshake(&[]))),
    ];
    for cut in 1..good.len() - 4 {
        // Ends early although its length says that it is whole.
        let body = &good[4..good.len() - cut];
        let reason = peek(&hellos::record(&hellos::handshake(body)));
        if body.len() == 2 + 32 + 7 {
            assert_eq!(reason, Peek::Reject(Reason::NoSni));
        } else {
            cases.push(("a short hello", hellos::record(&hellos::handshake(body))));
        }
    }
    for (case, bytes) in cases {
        assert_eq!(peek(&bytes), Peek::Reject(Reason::Malformed), "{case}");
    }
}

/// A hello with some bytes changed, in records of any sizes.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let hellos: Vec<Vec<u8>> = all().iter().map(|(_, _, hello)| hellos::joined(hello)).collect();
    let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let sizes = proptest::collection::vec(1..600_usize, 1..80);
    (prop::sample::select(hellos), changes, sizes).prop_map(|(mut handshake, changes, sizes)| {
        for (at, value) in changes {
            let at = at.index(handshake.len());
            handshake[at] = value;
        }
        let mut rest = handshake.as_slice();
        let mut wire = Vec::new();
        for size in sizes.into_iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (fragment, behind) = rest.split_at(size.min(rest.len()));
            wire.extend(hellos::record(fragment));
            rest = behind;
        }
        wire
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: u32::try_from(repetitions(10_000)).unwrap(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        peek(&bytes);
        agree(&bytes)?;
        // Behind a plausible beginning the parser gets further.
        let behind = hellos::record(&hellos::handshake(&bytes));
        peek(&behind);
        agree(&behind)?;
    }

    #[test]
    fn rustls_agrees_on_changed_hellos(wire in mutated()) {
        agree(&wire)?;
    }

    #[test]
    fn a_decision_never_changes_with_more_bytes(wire in mutated(), cut in any::<prop::sample::Index>()) {
        let early = peek(&wire[..cut.index(wire.len() + 1)]);
        if early != Peek::Incomplete {
            prop_assert_eq!(peek(&wire), early);
        }
    }

    #[test]
    fn so_many_bytes_always_suffice(sizes in proptest::collection::vec(1..=1_usize << 14, 65), length in 0..=MAX_HANDSHAKE) {
        let header = hellos::handshake(&vec![0; length]);
        let mut bytes = header.iter().copied().chain(std::iter::repeat(0));
        let mut wire = Vec::new();
        for size in sizes {
            if wire.len() < MAX_WIRE {
                wire.extend(hellos::record(&bytes.by_ref().take(size).collect::<Vec<u8>>()));
            }
        }
        wire.resize(wire.len().max(MAX_WIRE), 22);
        prop_assert_ne!(peek(&wire[..MAX_WIRE]), Peek::Incomplete);
    }
}
