"""System calls of Linux that isolate a process: namespaces, Landlock, seccomp, privileges."""
