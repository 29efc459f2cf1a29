//! Everything that needs no cluster: rendering, plans, the command line, and
//! sockets on loopback.

mod companion;
mod keys;
