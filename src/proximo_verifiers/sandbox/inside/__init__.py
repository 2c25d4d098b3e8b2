"""The fork server inside the sandbox: forks and confines a process for each program, and ends it at its limits."""
