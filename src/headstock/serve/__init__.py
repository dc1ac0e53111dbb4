"""`headstock serve`: runs behind an HTTP API and a web page."""
