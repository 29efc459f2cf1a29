//! Whether names below the gateway's domains lead to the gateway. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;

use super::{Check, Finding};

/// Where the gateway is reached, as its Service says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Addresses.
    pub ips: BTreeSet<IpAddr>,
    /// Host names, as some clouds give instead.
    pub hosts: BTreeSet<String>,
    /// The Service asks for none: what leads there is not known here.
    pub unasked: bool,
}

impl Addresses {
    /// Those that a Service has been given, or names itself.
    pub fn of(service: &Value) -> Self {
        let mut addresses = Self::default();
        let ingress = service.pointer("/status/loadBalancer/ingress").and_then(Value::as_array);
        for entry in ingress.into_iter().flatten() {
            addresses.ips.extend(entry["ip"].as_str().and_then(|ip| ip.parse::<IpAddr>().ok()));
            addresses.hosts.extend(entry["hostname"].as_str().map(str::to_owned));
        }
        let external = service.pointer("/spec/externalIPs").and_then(Value::as_array);
        addresses.ips.extend(external.into_iter().flatten().filter_map(|ip| ip.as_str()?.parse::<IpAddr>().ok()));
        addresses.unasked = service["spec"]["type"].as_str().is_some_and(|kind| kind != "LoadBalancer");
        addresses
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ips.is_empty() && self.hosts.is_empty()
    }
}

/// The records to create, one a line.
pub fn records(domain: &str, addresses: &Addresses) -> String {
    let record = |kind: &str, value: String| format!("*.{domain}. {kind} {value}");
    let ips = addresses.ips.iter().map(|ip| record(if ip.is_ipv4() { "A" } else { "AAAA" }, ip.to_string()));
    let hosts = addresses.hosts.iter().map(|host| record("CNAME", format!("{}.", host.trim_end_matches('.'))));
    // A name with a CNAME has no other records.
    if addresses.hosts.is_empty() { ips.collect::<Vec<_>>() } else { hosts.collect() }.join("; ")
}

/// What is found of one domain. `resolved` is where a random name below it
/// leads, or why it leads nowhere; `expected` are the gateway's addresses,
/// those of its host names included.
pub fn domain(
    domain: &str,
    resolved: Result<&BTreeSet<IpAddr>, &str>,
    addresses: &Addresses,
    expected: &BTreeSet<IpAddr>,
) -> Finding {
    let list = |ips: &BTreeSet<IpAddr>| ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let own = domain.ends_with(".localhost") || domain == "localhost";
    if own {
        return Check::Dns.ok(format!("*.{domain} is the own machine"));
    }
    if addresses.is_empty() && addresses.unasked {
        return match resolved {
            Ok(ips) => {
                Check::Dns.ok(format!("*.{domain} leads to {}, which is not known to be the gateway", list(ips)))
            }
            Err(why) => Check::Dns.warn(
                format!("*.{domain} does not resolve: {why}"),
                format!("create a record *.{domain}. of the nodes' addresses, or of what forwards to them"),
            ),
        };
    }
    if addresses.is_empty() {
        return Check::Dns.warn(
            format!("*.{domain}: the gateway's Service has no address yet"),
            "run `bko-install cluster check` again when it has one, for the record to create",
        );
    }
    let create = format!("create the record {}", records(domain, addresses));
    match resolved {
        Err(why) => Check::Dns.fail(format!("*.{domain} does not resolve: {why}"), create),
        Ok(ips) if expected.is_empty() => {
            let hosts: Vec<&str> = addresses.hosts.iter().map(String::as_str).collect();
            let message =
                format!("*.{domain} leads to {}; the gateway's {} does not resolve yet", list(ips), hosts.join(", "));
            Check::Dns.warn(message, "wait until the load balancer's own name is known, and check again")
        }
        Ok(ips) if ips.is_subset(expected) => Check::Dns.ok(format!("*.{domain} leads to {}", list(ips))),
        Ok(ips) if !ips.is_disjoint(expected) => Check::Dns.warn(
            format!("*.{domain} leads to {}, of which only {} is the gateway", list(ips), list(&(ips & expected))),
            create,
        ),
        Ok(ips) => Check::Dns.fail(
            format!("*.{domain} leads to {}, and the gateway is at {}", list(ips), list(expected)),
            format!("{create}, unless a proxy of yours is there"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Verdict;
    use super::*;

    fn ips(list: &[&str]) -> BTreeSet<IpAddr> {
        list.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn the_record_to_create_is_told() {
        let service = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"ip": "2001:db8::1"}]}}});
        let addresses = Addresses::of(&service);
        assert_eq!(records("b.test", &addresses), "*.b.test. A 192.0.2.1; *.b.test. AAAA 2001:db8::1");
        let host = Addresses::of(&json!({"status": {"loadBalancer": {"ingress": [{"hostname": "lb.example"}]}}}));
        assert_eq!(records("b.test", &host), "*.b.test. CNAME lb.example.");
        let external = Addresses::of(&json!({"spec": {"externalIPs": ["192.0.2.9"]}}));
        assert_eq!(records("b.test", &external), "*.b.test. A 192.0.2.9");
    }

    #[test]
    fn a_name_leads_to_the_gateway_or_it_does_not() {
        let addresses = Addresses { ips: ips(&["192.0.2.1", "2001:db8::1"]), ..Addresses::default() };
        for (resolved, verdict) in [
            (Ok(ips(&["192.0.2.1"])), Verdict::Ok),
            (Ok(ips(&["192.0.2.1", "198.51.100.1"])), Verdict::Warn),
            (Ok(ips(&["198.51.100.1"])), Verdict::Fail),
            (Err("no such name"), Verdict::Fail),
        ] {
            let found = domain("b.test", resolved.as_ref().map_err(|why| *why), &addresses, &addresses.ips);
            assert_eq!(found.verdict, verdict, "{found}");
        }
        let none = domain("b.test", Err("x"), &Addresses::default(), &BTreeSet::new());
        assert!(none.verdict == Verdict::Warn && none.message.contains("has no address yet"), "{none}");
        let nodes = Addresses::of(&json!({"spec": {"type": "NodePort"}}));
        assert_eq!(domain("b.test", Ok(&addresses.ips), &nodes, &BTreeSet::new()).verdict, Verdict::Ok);
        assert_eq!(domain("b.test", Err("x"), &nodes, &BTreeSet::new()).verdict, Verdict::Warn);
        assert_eq!(domain("buildkit.localhost", Err("x"), &addresses, &addresses.ips).verdict, Verdict::Ok);
    }
}
