"""The mathematics: numpy only, no files, no terminal."""
