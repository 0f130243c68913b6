"""What is published and deployed. Nothing of it is in a package but man pages and units."""
