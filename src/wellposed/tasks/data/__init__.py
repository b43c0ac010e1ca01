"""Where examples come from: files, tables, folders, images, generators."""
