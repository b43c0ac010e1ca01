"""Where examples come from: files, tables, folders, images, the hub."""
