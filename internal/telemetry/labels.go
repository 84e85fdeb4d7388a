package telemetry

// The labels of the traffic metrics, in ztunnel's order.
var labelNames = []string{
	"reporter",
	"source_workload", "source_canonical_service", "source_canonical_revision", "source_workload_namespace", "source_principal",
	"source_app", "source_version", "source_cluster",
	"destination_service", "destination_service_namespace", "destination_service_name",
	"destination_workload", "destination_canonical_service", "destination_canonical_revision", "destination_workload_namespace", "destination_principal",
	"destination_app", "destination_version", "destination_cluster",
	"request_protocol", "response_flags", "connection_security_policy",
	"source_region", "source_zone", "destination_region", "destination_zone",
}

// DroppableLabels are those whose values may be left out. What counts kinds of connections is not among them.
func DroppableLabels() []string {
	var list []string
	for i, n := range labelNames {
		if i != labelReporter && i != labelProtocol && i != labelFlags && i != labelSecurity {
			list = append(list, n)
		}
	}
	return list
}

// Places in labelNames.
const (
	labelReporter    = 0
	labelSource      = 1 // the first of eight
	labelService     = 9
	labelDestination = 12 // the first of eight
	labelProtocol    = 20
	labelFlags       = 21
	labelSecurity    = 22
	labelLocality    = 23
	labelCount       = 27
)
