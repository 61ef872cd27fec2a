"""Observation: a subject as a black box. It reads no source and knows no plan."""
