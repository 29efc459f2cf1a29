//! Everything that needs no cluster: rendering, plans, the command line, and
//! sockets on loopback.

mod keys;
mod router;
