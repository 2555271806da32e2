"""Prompts x methods: the decode loops are measured, certified and swept, for the report."""
