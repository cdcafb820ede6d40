"""SpecPilot: finds a configuration that decodes faster and changes no token (pilot.md)."""
