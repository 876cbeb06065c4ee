"""What is left of a run: addresses, records, files, tables, differences, sweeps. Opens without the model."""
