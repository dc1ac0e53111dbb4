"""The look that every page we write has in common: colours, charts, numbers and text with marks on it."""
