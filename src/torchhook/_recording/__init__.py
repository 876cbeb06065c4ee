"""What is left of a run: addresses, records, files, tables; differences, sweeps, lenses, statistics. Opens without the
model. ``records`` is where most begin."""
