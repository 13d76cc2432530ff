"""Arguments, files, signals, progress and run information; imports nothing else of the package."""
