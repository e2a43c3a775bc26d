"""How a run is carried out: its folder, its results, its promises; no stage."""
