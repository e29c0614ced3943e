//! What prefill and decode workers share: configuration, start, registration, serving, draining.
