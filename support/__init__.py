"""What every experiment needs and no paper speaks of: runs, files, meshes, pictures, scores."""
