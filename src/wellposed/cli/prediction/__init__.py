"""What `wellposed predict` does with a model, one file for each kind of model, and lines read and
written."""
