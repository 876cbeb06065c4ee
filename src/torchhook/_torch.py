"""Every private name of torch that is used, once."""
