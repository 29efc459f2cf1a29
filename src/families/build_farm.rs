//! The build farm: stock `buildkitd` daemons, one warm cache per project.
