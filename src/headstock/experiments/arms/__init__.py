"""The kinds of arms that a comparison can have, one per file."""
