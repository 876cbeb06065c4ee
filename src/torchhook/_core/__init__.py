"""The engine: a session resolves selectors to sites, attaches hooks, hands values on, and takes the hooks away."""
