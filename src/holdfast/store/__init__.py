"""Rows: the journal, the sessions, the receipts. SQLite here; another machine's database behind the same methods."""
