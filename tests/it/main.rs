//! Everything that needs no cluster: rendering, plans, the command line, and
//! sockets on loopback.

mod export;
mod keys;
mod profiles;
mod rendering;
mod daemons;
mod gateway;
mod keys;
mod router;
mod certificates;
mod cli;
mod image;
mod key_command;
mod keys;
mod plans;
mod readiness;
mod router;
