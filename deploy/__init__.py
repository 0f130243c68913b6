"""What the project publishes and deploys. Packages hold only its man pages and data files."""
