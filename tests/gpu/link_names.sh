# Sourced, with a folder: FlashInfer links with libcudart and libcuda, whose folders differ from machine to machine. When
# its modules are loaded, torch has both already; so for the linker their names are enough, and here they are. A linker
# leaves out libraries that it needs nothing of; without these two, calls would end in undefined symbols.
mkdir -p "$1"
for name in cudart.so.13 cuda.so.1; do
  cc -shared -x c /dev/null -Wl,-soname,"lib$name" -o "$1/lib${name%.*}" || echo "link_names.sh: no C compiler" >&2
done
export FLASHINFER_EXTRA_LDFLAGS="-L$1 -Wl,--no-as-needed -lcudart -lcuda"
