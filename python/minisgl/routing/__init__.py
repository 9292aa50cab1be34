"""Which of several engines gets a request, and when. `api` says what a router is, `reference` is the plain one."""
