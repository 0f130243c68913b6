"""Publishes and deploys the project. Packages hold only its man pages and data files."""
