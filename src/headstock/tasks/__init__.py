"""One file per objective or task; each registers itself. An objective is a task whose labels come free."""
