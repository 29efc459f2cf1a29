//! A real API server and a real node.

fn main() {}
