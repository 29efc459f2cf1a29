//! Everything that needs no cluster: rendering, plans, the command line, and
//! sockets on loopback.

mod certificates;
mod keys;
mod install;
mod plans;
mod readiness;
