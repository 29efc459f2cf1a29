//! What must be there before anything begins: flags that fit together, the
//! state folder, its lock, a token, and the ports.
#![expect(clippy::disallowed_methods, reason = "shell: reads and makes what the state folder holds")]

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use super::UpError;
use crate::local::args::{GatewayListen, UpArgs};
use crate::local::certificates::replace;
use crate::local::layout::Layout;
use crate::local::lock::Lock;
use crate::router::{self, GivenToken};
use crate::runtime::listen::ListenAddress;

/// Everything that must be there before anything begins.
pub(super) struct Prepared {
    pub(super) layout: Layout,
    pub(super) lock: Lock,
    pub(super) gateway: TcpListener,
    pub(super) api: TcpListener,
    pub(super) admin: TcpListener,
    pub(super) route: router::Config,
    pub(super) token: Option<PathBuf>,
    pub(super) port: u16,
}

/// Flags, folder, lock and ports, in an order in which nothing is done in vain.
pub(super) fn prepare(args: &UpArgs, uid: u32) -> Result<Prepared, UpError> {
    let layout = Layout::new(args.state.folder(uid))?;
    if args.domain().is_none() && matches!(args.listen, GatewayListen::Address(_)) {
        return Err(UpError::NoDomain(args.listen));
    }
    if !args.api_listen.is_loopback() {
        return Err(UpError::PlainApi(args.api_listen));
    }
    if args.daemons.daemon_port == 0 {
        return Err(UpError::NoPort);
    }
    for folder in [layout.root().to_owned(), layout.run(), layout.caches()] {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| UpError::Folder(folder.clone(), error))?;
        if folder == layout.root() {
            close(&folder, uid)?;
        }
    }
    let lock = Lock::take(&layout.lock())?;
    let (route, token) = route(args, &layout)?;
    let listen = |address: ListenAddress, flag| {
        address.bind().map_err(|source| UpError::Listen { address: address.to_string(), flag, source })
    };
    let gateway = match args.listen {
        GatewayListen::Address(address) => listen(address, "--listen")?,
        GatewayListen::Loopback(port) => loopback(port).map_err(|source| UpError::Listen {
            address: args.listen.to_string(),
            flag: "--listen",
            source,
        })?,
    };
    let port = gateway.local_addr().map_err(|error| UpError::System("tell an address", error))?.port();
    if port == args.daemons.daemon_port {
        return Err(UpError::SamePort(port));
    }
    let (api, admin) = (listen(args.api_listen, "--api-listen")?, listen(args.metrics_addr, "--metrics-addr")?);
    Ok(Prepared { layout, lock, gateway, api, admin, route, token, port })
}

/// A folder that was there already must be ours, and is nobody else's business from now on.
fn close(folder: &Path, uid: u32) -> Result<(), UpError> {
    let failed = |error| UpError::Folder(folder.to_owned(), error);
    let metadata = fs::metadata(folder).map_err(failed)?;
    if metadata.uid() != uid {
        return Err(UpError::Owner(folder.to_owned(), metadata.uid(), uid));
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(failed)?;
        tracing::warn!("the state folder was open to others (mode {mode:04o}), and is its owner's alone now (0700)");
    }
    Ok(())
}

/// Without any word on who may call: whoever can read the token that is made here.
fn route(args: &UpArgs, layout: &Layout) -> Result<(router::Config, Option<PathBuf>), UpError> {
    let mut flags = args.route.clone();
    let (given, folder) = (flags.auth_token.clone(), flags.auth_token_dir.clone());
    if flags.auth_open && (given.is_some() || folder.is_some()) {
        return Err(UpError::OpenWithToken);
    }
    // Clients on this host find the one that was given, as they find the one that is made.
    let handed = layout.run().join("token");
    let failed = |file: &Path| {
        let file = file.to_owned();
        move |error| UpError::Token(file, error)
    };
    let (path, hand) = match (given, folder) {
        (Some(given), _) => (Some(handed.clone()), Some(given)),
        (None, Some(folder)) => (Some(std::path::absolute(&folder).unwrap_or(folder).join("token")), None),
        (None, None) if flags.auth_open => (None, None),
        (None, None) => {
            let file = layout.token();
            let token = token(&file).map_err(failed(&file))?;
            let token = token.trim();
            if !token.chars().all(|c| c.is_ascii_graphic()) {
                return Err(UpError::OddToken(file));
            }
            flags.auth_token = Some(GivenToken::new(token));
            (Some(file), None)
        }
    };
    let config = router::Config::try_from(flags)?;
    match hand {
        Some(token) => replace(&handed, format!("{}\n", token.reveal()).as_bytes()).map_err(failed(&handed))?,
        // Of an earlier run.
        None => match std::fs::remove_file(&handed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&handed)(error)),
            _ => {}
        },
    }
    Ok((config, path))
}

fn token(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(token) if !token.trim().is_empty() => return Ok(token),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let token = hex::encode(bytes);
    replace(path, format!("{token}\n").as_bytes())?;
    Ok(token)
}

/// Every loopback address, and only what comes over the loopback device.
fn loopback(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.bind_device(Some(b"lo"))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(4096)?;
    TcpListener::from_std(socket.into())
}
