"""Objectives and tasks, one file each. An objective is a task whose labels come from the text itself."""
