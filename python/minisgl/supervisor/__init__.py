"""`minisgl serve`: a server and its engine process, from the start to the end."""
