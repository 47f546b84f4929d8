"""What damage, kills and hangs do to training: counts and seconds; README.md has the figures."""
