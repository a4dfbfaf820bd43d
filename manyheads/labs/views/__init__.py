"""What people see of labs and findings: text for a terminal, SVG and HTML for pages, and notebooks."""
