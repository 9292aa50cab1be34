"""llama.cpp's own routes: /completion, /infill, /apply-template, /props and /slots. Start reading in `endpoint.py`."""
