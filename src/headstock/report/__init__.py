"""Reports as self-contained HTML pages, and the charts and components they share with explanations."""
