"""The certificate: what was asked, what was run, what was found, and what that comes to."""
