"""Export of a module as flat programs: what is patched while a forward is traced, and lowering."""
