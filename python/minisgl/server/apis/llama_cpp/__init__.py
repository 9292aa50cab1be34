"""llama.cpp's own API, as far as its page and plugins of editors call it."""
