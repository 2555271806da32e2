"""Prompts x methods: the decode loops measured, certified, swept; the report is made from this."""
