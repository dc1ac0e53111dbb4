"""What keeps an installation in order: the checks of `headstock doctor` and the inventory of the cache."""
