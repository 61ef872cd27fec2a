"""Subjects: optimizers under test, connected by name and driven in a process of their own."""
