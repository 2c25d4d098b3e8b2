"""Programs of a response: found in its text, run in the sandbox on the tests of a row, and graded."""
