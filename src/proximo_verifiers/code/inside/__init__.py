"""What runs within the sandbox around a program: its tests, and the calls between both."""
