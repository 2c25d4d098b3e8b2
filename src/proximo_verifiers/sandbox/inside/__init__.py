"""What runs within the sandbox: a server that forks a process for each program, and ends it at its limits."""
