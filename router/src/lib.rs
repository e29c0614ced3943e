//! The router: HTTP and gRPC edge, tokenising, planning, retries.
