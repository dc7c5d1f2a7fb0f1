#!/bin/sh
# Compiler launcher for CUDA: keeps what `ptxas -v` reports (registers, spills) beside the object, as <object>.ptxas,
# for scripts/check_sass.py, and passes everything else on.
object=
previous=
for argument; do
  if [ "$previous" = -o ]; then object=$argument; fi
  previous=$argument
done
"$@" 2>"$object.ptxas"
status=$?
# What stays: warnings, errors, and the advisories that ptxas marks with a number, as "(C7510) ... serialized".
grep -v -e '^ptxas info    : [^(]' -e 'bytes stack frame, ' -e '^$' "$object.ptxas" >&2
exit $status
