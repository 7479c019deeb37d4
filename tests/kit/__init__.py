"""What the tests of whole processes are made of."""
