"""How a process begins under a profile that another process has resolved."""
