"""Runs the tests of a program in a process of their own inside the sandbox, and carries the calls between both."""
